"""Scheduled retraining: lease, data listing, comparison, champion."""
