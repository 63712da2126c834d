"""Random streams are functions of their keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvester.random import stream


def test_streams_depend_on_the_whole_key_and_on_nothing_else() -> None:
    keys: list[tuple[int | str, ...]] = [(1, 23), (12, 3), (1, 2, 3), (1, "23"), ("a", 1), (0,), ()]
    draws = {key: torch.randn(4, generator=stream(*key)) for key in keys}
    assert len({tuple(value.tolist()) for value in draws.values()}) == len(keys)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert torch.equal(torch.randn(4, generator=stream(1, 23)), draws[1, 23])
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_stay_what_they_are() -> None:
    """A resumed run goes on with the noise it was started with, whichever version resumes it."""
    seeds = {
        (1, "train", 3, 4, "noise"): 4584672414711205253,
        (0, "order", 1): 7021862330116196507,
        (7, "validation", 2, "binarize"): 1561908119019443656,
    }
    assert {key: stream(*key).initial_seed() for key in seeds} == seeds


def test_an_integer_is_an_integer_of_whatever_library() -> None:
    expected = stream(3, "noise").initial_seed()
    assert stream(np.int64(3), "noise").initial_seed() == expected
    assert stream(torch.tensor(3), "noise").initial_seed() == expected


@pytest.mark.parametrize("part", [1.0, None, (1, 2), b"noise"])
def test_other_keys_are_refused(part: object) -> None:
    with pytest.raises(ValueError, match=r"Expected a key of integers and strings; got"):
        stream(0, part)
