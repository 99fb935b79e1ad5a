# type: ignore
"""Write small checkpoints with TensorFlow, in the layout of the paper's code, and their features.

Run it in an environment of its own (Python 3.11, `tensorflow-cpu==2.21.0 tf_keras==2.21.0`):

    python make_tensorflow_checkpoints.py tensorflow
    python make_tensorflow_checkpoints.py FOLDER --full   # a ResNet-50 of full size, 0.4 GB
    python make_tensorflow_checkpoints.py tensorflow --keys cbyol_r50_keys.json

The last line compares names and shapes with the keys of a checkpoint of the official code.
Networks have 2 channels in the stem instead of 64. Attributes have the names of the official code,
because names in a checkpoint are paths of attributes. Weights and images are random.
"""

import argparse
import json
import os
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf
import tf_keras as keras

BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
STEP = 312_785


class Convolution(keras.layers.Layer):
    """A convolution without bias; stride 2 pads both sides equally."""

    def __init__(self, filters, side, stride):
        super().__init__()
        self.pad = (side - 1) // 2 if stride > 1 else 0
        padding = "same" if stride == 1 else "valid"
        self.conv2d = keras.layers.Conv2D(filters, side, stride, padding, use_bias=False)

    def call(self, x):
        return self.conv2d(tf.pad(x, [[0, 0], [self.pad] * 2, [self.pad] * 2, [0, 0]]))


class Norm(keras.layers.Layer):
    """Batch norm, then ReLU if asked for."""

    def __init__(self, relu=True):
        super().__init__()
        self.relu = relu
        self.bn = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)

    def call(self, x):
        x = self.bn(x, training=False)
        return tf.nn.relu(x) if self.relu else x


class Nothing(keras.layers.Layer):
    """Stand for drop-block and named identities, which take an index in lists of layers."""

    def call(self, x):
        return x


def chain(layers, x):
    for layer in layers:
        x = layer(x)
    return x


class Bottleneck(keras.layers.Layer):
    def __init__(self, filters, stride, project):
        super().__init__()
        self.projection_layers = []
        if project:
            self.projection_layers = [Convolution(4 * filters, 1, stride), Norm(relu=False)]
        self.shortcut_dropblock = Nothing()
        self.conv_relu_dropblock_layers = [
            *(Convolution(filters, 1, 1), Norm(), Nothing()),
            *(Convolution(filters, 3, stride), Norm(), Nothing()),
            *(Convolution(4 * filters, 1, 1), Norm(relu=False), Nothing()),
        ]

    def call(self, x):
        shortcut = chain(self.projection_layers, x)
        return tf.nn.relu(chain(self.conv_relu_dropblock_layers, x) + shortcut)


class Basic(keras.layers.Layer):
    def __init__(self, filters, stride, project):
        super().__init__()
        self.conv2d_bn_layers = [
            *(Convolution(filters, 3, stride), Norm()),
            *(Convolution(filters, 3, 1), Norm(relu=False)),
        ]
        self.shortcut_layers = []
        if project:
            self.shortcut_layers = [Convolution(filters, 1, stride), Norm(relu=False)]

    def call(self, x):
        shortcut = chain(self.shortcut_layers, x)
        return tf.nn.relu(chain(self.conv2d_bn_layers, x) + shortcut)


class Group(keras.layers.Layer):
    def __init__(self, block, filters, count, stride):
        super().__init__()
        self.layers = [block(filters, stride if i == 0 else 1, i == 0) for i in range(count)]

    def call(self, x):
        return chain(self.layers, x)


class ResNet(keras.layers.Layer):
    def __init__(self, depth, channels, name):
        super().__init__(name=name)
        pool = keras.layers.MaxPooling2D(3, 2, "same")
        stem = [Convolution(channels, 7, 2), Nothing(), Norm(), pool, Nothing()]
        self.initial_conv_relu_max_pool = stem
        block = Bottleneck if depth >= 50 else Basic
        self.block_groups = [
            Group(block, channels * 2**i, count, 2 if i else 1)
            for i, count in enumerate(BLOCKS[depth])
        ]

    def call(self, x):
        return tf.reduce_mean(
            chain([*self.initial_conv_relu_max_pool, *self.block_groups], x), [1, 2]
        )


class Linear(keras.layers.Layer):
    def __init__(self, units, norm=False, bias=False):
        super().__init__()
        self.dense = keras.layers.Dense(units, use_bias=bias)
        if norm:
            self.bn_relu = Norm(relu=False)

    def call(self, x):
        x = self.dense(x)
        return self.bn_relu(x) if hasattr(self, "bn_relu") else x


class Head(keras.layers.Layer):
    """The projection, or the predictor of BYOL."""

    def __init__(self, hidden, out):
        super().__init__()
        self.linear_layers = [Linear(hidden, norm=True), Linear(out)]

    def call(self, x):
        return self.linear_layers[1](tf.nn.relu(self.linear_layers[0](x)))


class StochasticHead(keras.layers.Layer):
    """The predictor of C-BYOL: layer 1 is never built. Returns mu and l(mu)."""

    def __init__(self, hidden, out):
        super().__init__()
        self.linear_layers = [Linear(hidden, norm=True), Linear(out), Linear(out), Linear(out)]

    def call(self, x):
        hidden = tf.nn.relu(self.linear_layers[0](x))
        mu = tf.math.l2_normalize(self.linear_layers[2](hidden), -1)
        return mu, self.linear_layers[3](mu)


class Classifier(keras.layers.Layer):
    def __init__(self, classes):
        super().__init__()
        self.linear_layer = Linear(classes, bias=True)

    def call(self, x):
        return self.linear_layer(x)


class Method(keras.Model):
    """The networks of a method; `compute` calls all of them once, which creates their variables."""

    def __init__(self, name, depth, channels, hidden, out, classes, classifier_on):
        super().__init__()
        self.classifier_on = classifier_on
        self._target_resnet = ResNet(depth, channels, "resnet_ema") if "byol" in name else None
        self._resnet = ResNet(depth, channels, "resnet")
        self._projection_head = Head(hidden, out)
        self._projector = self._target_head = self._target_projector = None
        if "byol" in name:
            self._projector = (StochasticHead if name == "c-byol" else Head)(hidden, out)
            self._target_head = Head(hidden, out)
        if name == "c-byol":
            self._target_projector = Head(hidden, out)
        self.supervised_head = Classifier(classes)

    def compute(self, images):
        h = self._resnet(images)
        r = self._projection_head(h)
        found = {"features": h, "projection": r}
        found["logits"] = self.supervised_head(h if self.classifier_on == "features" else r)
        if self._projector is not None:
            prediction = self._projector(r)
            if isinstance(prediction, tuple):
                found["mean"], prediction = prediction
            found["prediction"] = prediction
            found["target_features"] = self._target_resnet(images)
            found["target"] = target = self._target_head(found["target_features"])
        if self._target_projector is not None:
            found["backward"] = self._target_projector(tf.math.l2_normalize(target, -1))
        return found


class Lars(keras.optimizers.legacy.Optimizer):
    """An optimizer with the slots of the official LARS."""

    def __init__(self):
        super().__init__(name="Lars")

    def fill_slots(self, variables):
        random = np.random.RandomState(7)
        for variable in variables:
            slot = self.add_slot(variable, "Momentum")
            slot.assign(random.randn(*variable.shape).astype(np.float32))


class Exported(tf.Module):
    """What the official code exports: names in the file are positions in a list of variables."""

    def __init__(self, model):
        self.model = model
        self.trainable_variables_list = model.trainable_variables
        self.variables_list = model.variables


def fill(variables):
    """Set random weights that keep features near 1."""
    for i, variable in enumerate(variables):
        shape, kind = tuple(variable.shape), variable.name.rsplit("/", 1)[-1].partition(":")[0]
        noise = np.random.RandomState(1000 + i).randn(*shape)
        value = 0.1 * noise
        if kind == "kernel":
            value = noise * np.sqrt(1.6 / np.prod(shape[:-1]))
        elif kind == "gamma":
            value = 1 + 0.1 * noise
        elif kind == "moving_variance":
            value = 1 + 0.2 * np.abs(noise)
        variable.assign(value.astype(np.float32))


def images(side):
    """Return two images of noise, by a rule that the test repeats."""
    return np.random.RandomState(0).randn(2, side, side, 3).astype(np.float32)


def build(name, depth, channels, hidden, out, classes, classifier_on="projection", side=64):
    """Return a method with random weights, and its outputs for `images(side)`."""
    model = Method(name, depth, channels, hidden, out, classes, classifier_on)
    model.compute(tf.zeros([1, side, side, 3]))
    fill(model.variables)
    found = model.compute(tf.constant(images(side)))
    return model, {key: value.numpy() for key, value in found.items()}


def checkpoint(model):
    """Return a checkpoint with the objects of the official code."""
    step, optimizer = tf.Variable(STEP, dtype=tf.int64), Lars()
    trained = [*model._resnet.trainable_variables, *model._projection_head.trainable_variables]
    optimizer.fill_slots(trained)
    return tf.train.Checkpoint(model=model, global_step=step, optimizer=optimizer)


def names_and_shapes(prefix):
    return sorted((name, list(shape)) for name, shape in tf.train.list_variables(str(prefix)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--keys", type=Path)
    given = parser.parse_args()
    if given.keys or given.full:
        is_simclr = given.keys is not None and "csimclr" in given.keys.name
        name, on = ("simclr", "projection") if is_simclr else ("c-byol", "projection")
        model, outputs = build(name, 50, 64, 4096, 256, 1000, on, side=224)
        prefix = given.folder / "full" / "ckpt"
        checkpoint(model).save(str(prefix))
        np.savez(given.folder / "full" / "outputs.npz", **outputs)
        if given.keys:
            expected = sorted(json.loads(given.keys.read_text())["keys"])
            assert [list(pair) for pair in names_and_shapes(f"{prefix}-1")] == expected
            print(f"{len(expected)} names and shapes are equal")
        return
    model, outputs = build("c-byol", 50, 2, 8, 6, 5)
    checkpoint(model).save(str(given.folder / "c-byol" / "ckpt"))
    found = {f"c-byol/{key}": value for key, value in outputs.items()}
    model, outputs = build("simclr", 18, 2, 8, 6, 5, "features")
    tf.saved_model.save(Exported(model), str(given.folder / "exported"))
    found |= {f"exported/{key}": value for key, value in outputs.items()}
    np.savez(given.folder / "outputs.npz", **found)


if __name__ == "__main__":
    main()
