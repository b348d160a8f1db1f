"""What tools look for on a model, found on its offload: they take either.

Pipelines, harnesses, trainers and servers read a model's device, dtype, configuration and class, move it to where it
is, and call it. An offload answers all of that with the model's own, and runs what is called through itself.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self

from transformers import PreTrainedModel

from expertcast.predictors.errors import ExpertcastError


class StandIn:
    """Answers for `self.model` where it has no answer of its own; `isinstance` takes it for one of the model's class.

    What belongs to both, such as `generate`, is the offload's.
    """

    model: PreTrainedModel
    """The model that is stood in for."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """The model's class: tools look it up in their tables. `type` says what this really is."""
        return type(self.__dict__.get("model", self))

    def __getattr__(self, name: str) -> Any:
        """What only the model has.

        Raises:
            AttributeError: it has no such attribute either.
        """
        model = self.__dict__.get("model")
        if model is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(model, name)

    def __setattr__(self, name: str, value: object) -> None:
        """What only the model has is set there."""
        model = self.__dict__.get("model")
        own = model is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(model, name)
        if own:
            object.__setattr__(self, name, value)
        else:
            setattr(model, name, value)

    def __dir__(self) -> list[str]:
        """Both's names."""
        return sorted({*object.__dir__(self), *dir(self.model)})

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The model stays where it is, and as it is.

        Raises:
            ExpertcastError: that is not what was asked for.
        """
        self.model.to(*args, **kwargs)
        return self

    def eval(self) -> Self:
        """The model's own, for its norms and dropout."""
        self.model.eval()
        return self

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Neither `pickle`, `torch.save` nor `copy` can take slots and threads along.

        Raises:
            ExpertcastError: always.
        """
        raise ExpertcastError(
            "an offload cannot be pickled, saved by torch.save or copied: save its OffloadConfig, close it and save "
            "the model"
        )
