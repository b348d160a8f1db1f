"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import CBWorkerDeadError

from expertcast.predictors.errors import first_line
from expertcast.predictors.plain import Json
from expertcast.runtime.serving.generation import FailedError, StoppedError


def error_body(status: int, message: str) -> Json:
    """What a client of that API expects with a status of 400 and more."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def tell_errors(app: FastAPI) -> None:
    """Answer every error of an application so."""

    def answer(status: int, message: str) -> JSONResponse:
        return JSONResponse(error_body(status, message), status_code=status)

    @app.exception_handler(HTTPException)
    async def _refused(_request: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def _unread(_request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(400, f"the body is no JSON object: {error.errors()[0]['msg']}")

    @app.exception_handler(StoppedError)
    async def _stopped(_request: Request, error: StoppedError) -> JSONResponse:
        return answer(503, str(error))

    @app.exception_handler(CBWorkerDeadError)
    async def _dead(_request: Request, error: CBWorkerDeadError) -> JSONResponse:
        return answer(503, first_line(error))

    @app.exception_handler(FailedError)
    async def _failed(_request: Request, error: FailedError) -> JSONResponse:
        return answer(500, f"the generation failed: {error}")
