"""The examples in the docstrings of expertcast's public names run on the bundled model."""

import doctest
import inspect

import pytest

import expertcast
from expertcast.predictors.base import PREDICTORS
from expertcast.training.fit import fit

NAMES = [name for name in expertcast.__all__ if not name.startswith("_")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the `traces` and the `checkpoint` that examples open; `collect` then finds its traces complete."""
    from expertcast.data.models import load_model, load_tokenizer

    folder = tmp_path_factory.mktemp("examples")
    model, tokenizer = load_model("reference"), load_tokenizer("reference")
    documents = expertcast.load_documents("reference")
    traces = expertcast.collect(model, tokenizer, documents, folder / "traces", tokens=600, early_rank=None)
    expertcast.save_predictor(fit("quasi_hidden", traces).predictor, folder / "checkpoint", view=traces.view)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_example(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(PREDICTORS, "_classes", dict(PREDICTORS._classes))
    text = inspect.getdoc(getattr(expertcast, name)) or ""
    assert ">>> import expertcast" in text
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(test, out=report.append)
    assert not report, "".join(report)
