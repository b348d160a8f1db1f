"""What TensorBoard shows of a trained predictor beside its curves: the evaluation's figures, and the HPARAMS tab."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from expertcast.predictors.plain import Json
from expertcast.training.report import figures_of

_METRICS = ("recall_at_k", "recall_at_1.5k", "recall_at_2k", "weight_covered", "exact_set")


def log_evaluation(folder: Path, name: str, evaluation: Json, settings: Json) -> Path:
    """Add an evaluation's figures and hyperparameters to TensorBoard's logs, as a run of its own.

    Args:
        folder: of the logs.
        name: the predictor's, as `evaluation` has it.
        evaluation: `Evaluation.as_dict()`.
        settings: the hyperparameters, plain values. Lists are shown as text, None as "none".

    Returns:
        The run's folder, `evaluation/NAME_N`: N is the first that is free, so that the HPARAMS tab compares trainings.
    """
    run = next(path for number in count() if not (path := folder / "evaluation" / f"{name}_{number}").exists())
    parameters = {key: value if isinstance(value, bool | int | float | str) else _words(value)
                  for key, value in settings.items()}  # fmt: skip
    metrics = {f"test/{metric}": evaluation[metric][name]["mean"] for metric in _METRICS}
    metrics["test/ece"] = evaluation["calibration"][name]["ece"]
    with SummaryWriter(str(run)) as writer:
        for file_name, figure in figures_of(evaluation, name).items():
            writer.add_figure(Path(file_name).stem, figure)
        writer.add_hparams(parameters, metrics, run_name=".", global_step=0)
    return run


def _words(value: object) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
