"""A real headless Chromium, driven over its DevTools pipe (null-separated JSON on file descriptors 3 and 4)."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 60.0


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


# Scrolls to an element, waits until it is at rest, and returns its middle. `window.clicked` becomes true when a click
# hits the element, and false when it hits another one.
_REST = """(async () => {
  const e = document.querySelector(%s);
  let before = "", now = [];
  for (let round = 0; round < 60; round++) {
    e.scrollIntoView({block: "center", behavior: "instant"});
    const b = e.getBoundingClientRect();
    now = [b.x + b.width / 2, b.y + b.height / 2];
    if (String(now) === before && e.contains(document.elementFromPoint(...now))) break;
    before = String(now);
    await new Promise(done => setTimeout(done, 30));
  }
  window.clicked = new Promise(done => {
    const arrived = event => {
      const met = e.contains(event.target);
      if (!met) { event.stopImmediatePropagation(); event.preventDefault(); }
      done(met);
    };
    addEventListener("click", arrived, {once: true, capture: true});
    setTimeout(() => { removeEventListener("click", arrived, {capture: true}); done(false); }, 3000);
  });
  return now;
})()"""


class Page:
    """One tab: navigate, evaluate, press keys, look. `problems` collects console errors and blocked or failed loads."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._buffer, self._count, self._session = read, write, b"", 0, ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message; adds problems and requests of events."""
        until = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {DEADLINE_S:.0f} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("Chromium ended")
            self._buffer += data
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(raw)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["exception"].get("description", "exception"))
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def open(self, path: Path) -> None:
        self.visit(path.resolve().as_uri())

    def visit(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def window(self, width: int, height: int, *, dark: bool = False) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """A key as from a keyboard: `code` is the virtual key code (Enter 13, Escape 27, arrows 37 to 40, Tab 9)."""
        key_event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", **key_event, **({"text": text} if text else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **key_event)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def move(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Clicks the middle of the first matching element, after it is scrolled into view and at rest.

        Pictures that load while the page scrolls move the elements below them. A click that would hit another element
        is suppressed and repeated.
        """
        for _ in range(10):
            x, y = self.evaluate(_REST % json.dumps(selector))
            for kind in ("mousePressed", "mouseReleased"):
                self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
            if self.evaluate("window.clicked"):
                return
        raise AssertionError(f"the click on {selector} did not arrive")


@contextmanager
def chromium_page(program: str, profile: Path) -> Iterator[Page]:
    """A tab of a fresh browser with an empty profile in the given folder; the browser ends with the block."""
    to_browser, ours_write = os.pipe()
    ours_read, from_browser = os.pipe()

    def pass_pipes() -> None:  # in the child: Chromium expects the pipes at descriptors 3 and 4
        read, write = os.dup(to_browser), os.dup(from_browser)
        os.dup2(read, 3)
        os.dup2(write, 4)

    command = [program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-gpu"]
    command += ["--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium's sandbox refuses to start as root, as in a container
    with (profile.parent / "chromium.log").open("wb") as log:
        browser = subprocess.Popen(command, preexec_fn=pass_pipes, close_fds=False, stdout=log, stderr=log)
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(ours_read, ours_write)
    finally:
        os.close(ours_write)
        os.close(ours_read)
        browser.terminate()
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
