"""Quality of a model with executed forecasts or lossy policies."""
