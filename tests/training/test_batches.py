"""Which samples a step sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasterisnet.data.loader import Batches


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 3), st.integers(0, 5))
def test_processes_share_out_what_one_would_see(samples: int, size: int, processes: int, epoch: int) -> None:
    def batches(rank: int, of: int) -> list[list[tuple[int, int]]]:
        found = Batches(samples, size, seed=3, shuffle=False, share=(rank, of))
        found.epoch = epoch
        return list(found)

    whole = [key for batch in batches(0, 1) for key in batch]
    assert sorted(key for rank in range(processes) for batch in batches(rank, processes) for key in batch) == sorted(
        whole
    )
    assert whole == [(epoch, i) for i in range(samples)]


@given(st.integers(2, 60), st.integers(2, 12), st.integers(0, 5))
def test_going_on_in_the_middle(samples: int, size: int, start: int) -> None:
    batches = Batches(samples, size, seed=3, shuffle=True)
    every = list(batches)
    assert len(every) == batches.count()
    batches.start = min(start, len(every))
    assert list(batches) == every[batches.start :]


def test_every_epoch_and_seed_has_an_order_of_its_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        batches = Batches(50, 10, seed=seed, shuffle=True)
        batches.epoch = epoch
        return [index for batch in batches for _, index in batch]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(sorted(o) == list(range(50)) for o in orders)
    assert len({tuple(o) for o in orders}) == 9
    assert order(1, 2) == orders[5]


@pytest.mark.parametrize(("samples", "count"), [(20, 2), (21, 2), (22, 3), (23, 3)])
def test_only_a_last_batch_of_one_sample_is_left_out(samples: int, count: int) -> None:
    for processes in (1, 2, 3):
        batches = Batches(samples, 10, seed=0, shuffle=True, share=(0, processes))
        assert batches.count() == len(list(batches)) == count


@given(st.integers(2, 60), st.integers(2, 12), st.integers(1, 5))
def test_processes_learn_from_what_one_would(samples: int, size: int, processes: int) -> None:
    """Every process has as many batches, and a last one is shared so that nobody has a single sample."""
    whole = list(Batches(samples, size, seed=3, shuffle=True))
    parts = [list(Batches(samples, size, seed=3, shuffle=True, share=(r, processes))) for r in range(processes)]
    assert {len(part) for part in parts} == {len(whole)}
    for number, batch in enumerate(whole):
        shares = [part[number] for part in parts]
        assert sorted(key for share in shares for key in share) == sorted(batch)
        counted, among = Batches(samples, size, seed=3, shuffle=True, share=(0, processes)).shared(number)
        assert counted == len(batch)
        assert [share for share in shares[:among] if share] == [
            batch[r::among] for r in range(among) if batch[r::among]
        ]
        assert not any(shares[among:])
        if len(batch) < size:
            assert 1 not in map(len, shares)
