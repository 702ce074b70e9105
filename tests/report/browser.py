"""A headless Chromium, driven through chromedriver's own protocol (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Right": "\ue014", "Left": "\ue012", "Down": "\ue015", "Up": "\ue013", "End": "\ue010", "Tab": "\ue004"}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def missing() -> str:
    """Return why no browser can be started; "" where one can."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    absent = [
        name for name, found in (("chromium", chromium), ("chromedriver", shutil.which("chromedriver"))) if not found
    ]
    return f"no {' and no '.join(absent)} is installed" if absent else ""


class Browser:
    """One session; a page is open at a time."""

    def __init__(self, port: int, profile: Path) -> None:
        self._root = f"http://127.0.0.1:{port}"
        self._wait()
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"

    def open(self, page: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Open a file in a window of a size, in CSS pixels."""
        self.say()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._developer("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._developer("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._post("/url", {"url": page.resolve().as_uri()})
        self.run("document.documentElement.style.scrollBehavior = 'auto'")

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function's body in the page and return what it returns."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def say(self) -> list[str]:
        """Return what the page has written to the console since the last time, errors of loading among it."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def point(self, selector: str, x: int = 0, y: int = 0, *, click: bool = False) -> None:
        """Move the pointer to an element, by default to its middle, after scrolling it into view."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        moves: list[dict[str, Any]] = [
            {"type": "pointerMove", "duration": 0, "origin": self._find(selector), "x": x, "y": y}
        ]
        moves += [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp") if click]
        self._post("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})

    def press(self, selector: str, *keys: str) -> None:
        """Focus an element and press keys, by their names in KEYS."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        actions = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def picture(self) -> bytes:
        """Return what the window shows as a PNG."""
        shot = self._developer("Page.captureScreenshot", {})
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._call("DELETE", self._session)

    def _find(self, selector: str) -> dict[str, str]:
        found = self._post("/element", {"using": "css selector", "value": selector})
        return {ELEMENT: str(found[ELEMENT])}

    def _developer(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _post(self, path: str, body: Any) -> Any:
        return self._call("POST", self._session + path, body)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def _wait(self) -> None:
        for _ in range(300):
            with contextlib.suppress(OSError):
                if self._call("GET", "/status")["ready"]:
                    return
            time.sleep(0.1)
        raise AssertionError("chromedriver does not answer")


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser with an empty profile, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with tempfile.TemporaryDirectory(prefix="flexgen-browser-", ignore_cleanup_errors=True) as profile:
            started = Browser(port, Path(profile))
            try:
                yield started
            finally:
                started.close()
    finally:
        driver.terminate()
        driver.wait(timeout=30)
