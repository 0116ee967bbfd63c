"""Scheduled retraining: listing of the data, decision, champion, and the page that shows it."""
