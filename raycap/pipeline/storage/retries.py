"""How long failed requests to S3 are repeated: for a number of minutes, where botocore counts attempts.

The rules of botocore's mode "standard" decide which failures are repeated and how long the pauses are: random, growing,
and at most 20 s. Without them, none of its modes survives an outage of minutes. In "standard" all threads of a client
share a quota of 35 to 100 repeats, which an outage uses up within seconds. "adaptive" has the same quota, and one
overloaded prefix slows down every request of the client. "legacy" has no quota, but its pauses double without a limit,
so that it may notice the end of an outage as late again as the outage lasted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)

LOG_EVERY_S = 30.0  # a client that repeats requests for longer than this logs it this often
FIRST_FAILURE = "raycap_first_failure"  # the key in botocore's context of a request for the time of its first failure
MANY_ATTEMPTS = 10**6  # the time ends the repeats, not the number


class Retries:
    """Repeats the failed requests of one client, each for `minutes` from its first failure."""

    def __init__(self, minutes: float) -> None:
        from botocore.retries import standard

        self._seconds, self._lock, self._logged_at = 60 * minutes, threading.Lock(), -math.inf
        self._adapter = standard.RetryEventAdapter()
        throttling = standard.ThrottlingErrorDetector(self._adapter)
        self._policy = standard.RetryPolicy(
            standard.StandardRetryConditions(MANY_ATTEMPTS), standard.ExponentialBackoff(throttling_detector=throttling)
        )

    def register(self, client: Any) -> None:
        """Handles the client's failed requests from now on. The client's own retries must be switched off."""
        client.meta.events.register_last("needs-retry.s3", self.pause)

    def pause(self, **event: Any) -> float | None:
        """The seconds to wait before the next attempt; None after a success, a refusal or the last attempt.

        event: the values of botocore's event needs-retry.
        """
        context = self._adapter.create_retry_context(**event)
        if not self._policy.should_retry(context):
            return None
        now = time.monotonic()
        failing_s = now - context.request_context.setdefault(FIRST_FAILURE, now)
        left_s = self._seconds - failing_s
        if left_s <= 0:
            return None
        if self._may_log(failing_s, now):
            reason = context.caught_exception or context.get_error_code() or context.http_response.status_code
            logger.warning(
                f"S3: {event['operation'].name} {event['request_dict']['url']} has failed for {failing_s:.0f} s "
                f"({' '.join(str(reason).split())}); it is repeated for up to {left_s / 60:.1f} more minutes"
            )
        return min(left_s, float(self._policy.compute_retry_delay(context)))

    def _may_log(self, failing_s: float, now: float) -> bool:
        """Whether a request that has failed for `failing_s` seconds is logged: one of a client every LOG_EVERY_S."""
        with self._lock:
            if failing_s < LOG_EVERY_S or now - self._logged_at < LOG_EVERY_S:
                return False
            self._logged_at = now
            return True
