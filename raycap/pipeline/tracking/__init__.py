"""The connection to MLflow. Only this package imports `mlflow`."""
