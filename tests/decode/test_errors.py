from __future__ import annotations

import inspect

from muser_decode import errors


def test_every_error_is_a_decode_error_with_its_own_code() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert all(issubclass(cls, errors.DecodeError) for cls in classes)
    codes = [cls.code for cls in classes]
    assert len(set(codes)) == len(codes)
    assert "engine_busy" in codes
