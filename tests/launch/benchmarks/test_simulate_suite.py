"""Suite `simulate`: its rows, on few requests."""

from launch.benchmarks import simulate
from launch.benchmarks.options import Options


def test_a_row_is_requests_per_second(monkeypatch):
    monkeypatch.setattr(simulate, "QUICK_REQUESTS", 30)
    monkeypatch.setattr(simulate, "ROWS", {"conversation_16": (2, 1), "nodes_256": (4, 2)})
    rows = simulate.run(Options(True, None, "", ()))
    assert [(row.name, row.unit, row.better) for row in rows] == [
        ("conversation_16", "requests/s", "higher"),
        ("nodes_256", "requests/s", "higher"),
    ]
    assert all(row.ours > 0 for row in rows)


def test_rows_can_be_chosen(monkeypatch):
    monkeypatch.setattr(simulate, "QUICK_REQUESTS", 5)
    rows = simulate.run(Options(True, None, "", ("conversation",)))
    assert [row.name for row in rows] == ["conversation_16"]
