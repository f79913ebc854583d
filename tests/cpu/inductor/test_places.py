"""Whether two places overlap, against counting their elements."""

from itertools import product

import hypothesis.strategies as st
from hypothesis import given, settings

from dynaflow.inductor.places import Place, are_disjoint


def elements(place: Place) -> set[int]:
    return {place.offset + sum(i * step for i, step in zip(at, place.stride)) for at in product(*map(range, place.shape))}


places = st.builds(
    lambda offset, dims: Place(offset, tuple(size for size, _ in dims), tuple(step for _, step in dims)),
    st.integers(0, 12), st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])), max_size=3),
)  # fmt: skip


@settings(max_examples=2000, deadline=None)
@given(places, places)
def test_never_claims_what_is_not_so(a, b):
    if are_disjoint(a, b):
        assert not elements(a) & elements(b)


def test_slices_of_channels_are_apart():
    """Channels last: the slices of a concatenation lie interleaved."""
    steps = (24 * 36, 1, 24 * 6, 24)
    a, b = Place(0, (2, 8, 6, 6), steps), Place(8, (2, 16, 6, 6), steps)
    assert are_disjoint(a, b) and are_disjoint(b, a)
    assert not are_disjoint(a, Place(7, (2, 16, 6, 6), steps))


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_slices_of_any_dim_are_apart(rows, left, right, inner, dim):
    shape = [rows, left + right, inner]
    shape[1], shape[dim] = shape[dim], shape[1]
    steps = (shape[1] * shape[2], shape[2], 1)
    first, second = list(shape), list(shape)
    first[dim], second[dim] = left, right
    assert are_disjoint(Place(0, tuple(first), steps), Place(left * steps[dim], tuple(second), steps))
