"""Convert TensorFlow checkpoints of the paper's code to encoders, without TensorFlow."""
