"""Sends runs and models to MLflow. Only this package imports `mlflow`."""
