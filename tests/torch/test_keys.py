from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from fastpipe.torch.randomness import key_for, keyed, take_key


def test_a_key_numbers_its_samples_from_the_first() -> None:
    key = key_for(7, 3, 10, 4)
    assert (key.seed, key.epoch, key.draws.tolist()) == (7, 3, [10, 11, 12, 13])
    assert key.draws.dtype == np.int64


def test_samples_take_their_draws_one_after_the_other() -> None:
    with keyed(key_for(7, 3, 10, 4)):
        first, is_keyed = take_key(1)
        rest, rest_is_keyed = take_key(3)
    assert is_keyed
    assert rest_is_keyed
    assert (first.seed, first.epoch, first.draws.tolist(), rest.draws.tolist()) == (7, 3, [10], [11, 12, 13])


def test_more_samples_than_draws_come_from_the_global_generator() -> None:
    with keyed(key_for(7, 3, 10, 2)):
        assert take_key(2)[1]
        key, is_keyed = take_key(1)
    assert not is_keyed
    assert key.draws.tolist() == [0]


def test_a_block_ends_with_its_key_also_after_an_error() -> None:
    with pytest.raises(KeyError), keyed(key_for(1, 0, 0, 5)):
        raise KeyError
    assert not take_key(1)[1]


def test_blocks_nest() -> None:
    with keyed(key_for(1, 0, 0, 5)):
        take_key(2)
        with keyed(key_for(2, 0, 100, 5)):
            assert take_key(1)[0].draws.tolist() == [100]
        assert take_key(1)[0].draws.tolist() == [2]


def test_a_key_belongs_to_its_thread() -> None:
    found: list[bool] = []
    with keyed(key_for(1, 0, 0, 5)):
        thread = threading.Thread(target=lambda: found.append(take_key(1)[1]))
        thread.start()
        thread.join()
    assert found == [False]


def test_without_a_key_the_seed_comes_from_torchs_generator() -> None:
    torch.manual_seed(4)
    seeds = [take_key(3)[0].seed for _ in range(2)]
    torch.manual_seed(4)
    again = take_key(3)[0]
    assert again.seed == again.seed == seeds[0]
    assert seeds[0] != seeds[1]
    assert again.draws.tolist() == [0, 1, 2]


def test_without_a_key_the_generator_stays_until_something_is_drawn_whichever_device_is_the_default() -> None:
    before = torch.get_rng_state()
    with torch.device("meta"):
        key, _ = take_key(3)
        assert torch.equal(before, torch.get_rng_state())
        assert key.seed
    assert not torch.equal(before, torch.get_rng_state())


def test_with_a_key_torchs_generator_stays_as_it_is() -> None:
    before = torch.get_rng_state()
    with keyed(key_for(1, 0, 0, 5)):
        take_key(5)
    assert torch.equal(before, torch.get_rng_state())
