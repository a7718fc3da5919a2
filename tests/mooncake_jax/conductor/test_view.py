"""The view's columns, its changes and its plain form."""

import json

import numpy as np
import pytest

from kvstore.errors import InvalidError
from mooncake_jax.conductor.view import ClusterView, DecodeRow, PrefillRow

P0 = PrefillRow("p0", True, 100, 4, 1, 12.5, 1.0)
P1 = PrefillRow("p1", False, 200, 8, 0, 0.0, 0.5)
D0 = DecodeRow("d0", True, 100, 4, 2, 30, 40, 400)


def filled() -> ClusterView:
    view = ClusterView()
    view.put_prefill(0, P0)
    view.put_prefill(1, P1)
    view.put_decode(0, D0)
    return view


def test_rows_become_columns_and_rows_again():
    view = filled()
    assert view.version == 3
    assert view.prefill.names == ["p0", "p1"]
    assert view.prefill.alive.tolist() == [True, False]
    assert view.prefill.busy_until.tolist() == [12.5, 0.0]
    assert view.decode.capacity_tokens.dtype == np.int64
    assert view.prefill_rows() == [P0, P1]
    assert view.decode_rows() == [D0]


def test_a_slot_beyond_the_next_is_invalid():
    view = ClusterView()
    view.put_prefill(0, P0)
    with pytest.raises(InvalidError, match="slot 2 after 1 slots"):
        view.put_prefill(2, P1)


def test_changes_in_order_rebuild_the_view():
    view, other = ClusterView(), ClusterView()
    view.put_prefill(0, P0)
    view.put_prefill(1, P0)
    other.apply(view.take_changes(), view.version)
    view.put_prefill(1, P1)
    view.put_decode(0, D0)
    changes = view.take_changes()
    assert [slot for slot, _ in changes.prefill] == [1]
    other.apply(changes, view.version)
    assert other.to_dict() == view.to_dict() == {**filled().to_dict(), "version": 4}
    assert view.take_changes().prefill == []


def test_plain_form_survives_json():
    view = filled()
    assert ClusterView.from_dict(json.loads(json.dumps(view.to_dict()))).to_dict() == view.to_dict()


@pytest.mark.parametrize("raw", [{}, {"version": 1, "prefill": [["p0", True]], "decode": []}, []])
def test_another_form_is_invalid(raw):
    with pytest.raises(InvalidError, match="cluster view"):
        ClusterView.from_dict(raw)


def test_derived_columns_follow_rows_and_settings():
    view, calls = ClusterView(), []

    def derive(row, settings):
        calls.append(row.name)
        return (row.num_requests * settings[0], 1.0)

    ten, two = [10], [2]
    for slot, name in enumerate(("a", "b")):
        view.put_prefill(slot, PrefillRow(name, True, 100, 1, slot + 1, 0.0, 1.0))
    assert [column.tolist() for column in view.prefill.derived(derive, ten)] == [[10.0, 20.0], [1.0, 1.0]]
    view.put_prefill(1, PrefillRow("b", True, 100, 1, 5, 0.0, 1.0))
    assert view.prefill.derived(derive, ten)[0].tolist() == [10.0, 50.0]
    assert calls == ["a", "b", "b"]
    assert view.prefill.derived(derive, ten)[0].tolist() == [10.0, 50.0]
    assert calls == ["a", "b", "b"]
    assert view.prefill.derived(derive, two)[0].tolist() == [2.0, 10.0]
    view.put_prefill(2, PrefillRow("c", True, 100, 1, 7, 0.0, 1.0))
    assert view.prefill.derived(derive, two)[0].tolist() == [2.0, 10.0, 14.0]
