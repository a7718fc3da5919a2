import msgspec
import pytest

from mooncake_jax.frontend import encoding
from mooncake_jax.frontend.encoding import PIECE, encoded


@pytest.mark.parametrize("length", [0, 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 7])
def test_pieces_join_to_what_one_call_gives(length):
    body = {
        "id": 'é\n"',
        "none": None,
        "choices": [
            {"tokens": [str(i) for i in range(length)], "top": [{"a": -1.5, "": 0} for _ in range(length)]},
            {"nested": [[[1]] * length, []], "empty": {}},
        ],
    }
    assert encoded(body) == msgspec.json.encode(body)


def test_no_call_encodes_more_than_a_piece(monkeypatch):
    def encode(value):
        assert not isinstance(value, list) or len(value) <= PIECE
        assert not isinstance(value, dict)
        calls.append(value)
        return whole(value)

    calls, whole = [], msgspec.json.encode
    monkeypatch.setattr(encoding.msgspec.json, "encode", encode)
    encoded({"choices": [{"logprobs": {"top_logprobs": [{"a": 1.0}] * (10 * PIECE)}}]})
    assert sum(isinstance(value, list) for value in calls) == 10
