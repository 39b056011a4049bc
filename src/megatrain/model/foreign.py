"""Failures of the models' own code: it meets values of a config.json that nobody tried before."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from megatrain.errors import MegatrainError, ModelError

P = ParamSpec("P")
R = TypeVar("R")
_ROOMS = ("/transformers/models/", "/transformers_modules/", "/transformers/modeling_")


def reason_of(error: BaseException) -> str:
    """What an exception of somebody else's code says, in one line; a bare key or nothing gets its kind before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return (text if " " in text else f"{type(error).__name__} {text}".strip())[:500]


def models_may_fail(run: Callable[P, R]) -> Callable[P, R]:
    """`run`, raising ModelError for an exception that came through the code of a model. Others are bugs of ours."""

    @wraps(run)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return run(*args, **kwargs)
        except MegatrainError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            if not any(room in frame.filename for frame in frames for room in _ROOMS):
                raise
            raise ModelError(
                f"the model's own code fails with its config: {reason_of(error)}",
                where="model.path",
                hint="check the values in config.json and model.config",
            ) from error

    return guarded
