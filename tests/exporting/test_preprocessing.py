"""Preprocessing as a graph matches `Encoder.preprocess`."""

import exportable
import pytest
import torch

from compressive.augment.published_crop import PublishedCrop
from compressive.exporting.preprocessing import GraphPreprocessing

SIZES = [(16, 16), (32, 20), (33, 32), (47, 91), (300, 40), (40, 300), (1, 1), (2, 70), (128, 96)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("antialias", [False, True])
def test_image_of_any_size_is_preprocessed_as_by_the_encoder(
    size: tuple[int, int], antialias: bool
) -> None:
    encoder = exportable.model(side=32, antialias=antialias).encoder
    images = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    images[1] = 255 * (images[1] > 127)  # overshoots of the cubic kernel are clipped
    found = GraphPreprocessing(encoder)(images)
    torch.testing.assert_close(found, encoder.preprocess(images), rtol=0, atol=2e-6)


def test_cropped_edge_counts_for_the_unit_of_weights() -> None:
    """Only rows of the edge, which are cropped, have the largest weight."""
    encoder = exportable.model(size=37, side=64).encoder
    encoder.size = 32  # no central crop
    graph = GraphPreprocessing(encoder)
    graph.least, graph.canvas = 37, 74
    images = torch.randint(0, 256, (1, 3, 626, 305), dtype=torch.uint8)
    from compressive.data.decode import shrink

    small, height, width = graph._shrink(images)
    expected = shrink(images[0], 64, 37)
    assert (int(height), int(width)) == tuple(expected.shape[1:])
    assert torch.equal(small[0, :, : expected.shape[1], : expected.shape[2]], expected)


def test_crop_of_third_party_weights_is_kept() -> None:
    encoder = exportable.model(crop=PublishedCrop(0.9, "bicubic")).encoder
    images = torch.randint(0, 256, (2, 3, 41, 63), dtype=torch.uint8)
    found = GraphPreprocessing(encoder)(images)
    torch.testing.assert_close(found, encoder.preprocess(images), rtol=0, atol=2e-6)
