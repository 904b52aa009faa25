from __future__ import annotations

import inspect

from muser_prefill import errors

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass)]


def test_one_base_catches_everything() -> None:
    assert len(CLASSES) > 3
    assert all(issubclass(cls, errors.PrefillError) for cls in CLASSES)


def test_codes_tell_the_classes_apart() -> None:
    assert len({cls.code for cls in CLASSES}) == len(CLASSES)
