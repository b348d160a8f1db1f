"""What executing forecasts and leaving out experts costs a model: a suite of tasks, the rows, and the command."""
