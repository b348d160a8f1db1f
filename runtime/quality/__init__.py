"""What executed forecasts and lossy policies cost a model in quality."""
