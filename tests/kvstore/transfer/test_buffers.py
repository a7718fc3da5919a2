import numpy as np
import pytest

from kvstore.transfer.buffers import address_of, byte_view


class OnlyDlpack:
    """What a framework's array looks like: no buffer protocol."""

    def __init__(self, array, device=(1, 0)):
        self._array, self._device = array, device

    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._device


def test_dlpack_memory_on_the_host_is_viewed_not_copied():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    view = byte_view(OnlyDlpack(array))
    assert (view.format, view.shape, view.readonly) == ("B", (24,), False)
    assert address_of(view) == array.ctypes.data
    view[:4] = np.float32(7).tobytes()
    assert array[0, 0] == 7


@pytest.mark.parametrize(
    ("buffer", "complaint"),
    [
        (OnlyDlpack(np.zeros(4), device=(2, 3)), "on DLPack device 2:3"),
        (OnlyDlpack(np.zeros((4, 4)).T[1:]), "not C-contiguous"),
        (np.zeros((4, 4))[:, ::2], "not C-contiguous"),
    ],
)
def test_memory_that_cannot_be_viewed_as_bytes_is_refused(buffer, complaint):
    with pytest.raises(ValueError, match=complaint):
        byte_view(buffer)


def test_neither_a_buffer_nor_dlpack():
    with pytest.raises(TypeError):
        byte_view("text")


def test_empty_memory_has_no_address():
    assert address_of(byte_view(np.zeros((0, 3)))) == 0
