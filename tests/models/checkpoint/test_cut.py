"""The default cut of a loaded model."""

import pytest

from models.checkpoint.cut import layers_per_group


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(30, 6), (32, 8), (80, 20), (16, 4), (7, 1), (2, 1), (1, 1)]
)
def test_groups_are_equal_and_few(num_layers, expected):
    assert layers_per_group(num_layers) == expected


@pytest.mark.parametrize("num_layers", [0, -1, 10**9, "30"])
def test_nonsense_is_refused(num_layers):
    with pytest.raises(ValueError, match="layers: expected"):
        layers_per_group(num_layers)
