"""Headless Chromium for tests and screenshots, driven over its debugging pipe; no package is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from base64 import b64decode
from io import FileIO
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ON_THREE_AND_FOUR = """
import fcntl, os, sys
far = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(far[0], 3), os.dup2(far[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads its commands from descriptor 3 and answers on 4."""


class Browser:
    """One Chromium process with one open page."""

    def __init__(self, folder: Path) -> None:
        """Start Chromium with its profile in `folder`."""
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--window-size=1280,900"]
        launch = [sys.executable, "-c", ON_THREE_AND_FOUR, str(theirs_in), str(theirs_out), str(CHROMIUM), *flags]
        self.process = subprocess.Popen(
            [*launch, f"--user-data-dir={folder}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out):
            os.close(fd)
        self.reader, self.writer = FileIO(ours_in, "r"), FileIO(ours_out, "w")
        self.rest, self.count = b"", 0
        self.target: str | None = None
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result; store events received before it."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                got = self.reader.read(65536)
                assert got, "Chromium ended"
                self.rest += got
            one, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, width: int = 1280, scheme: str | None = None) -> None:
        """Open a page in a new tab and close the previous one. Widths below 600 px are those of a phone with touch."""
        before, self.session = self.target, None
        self.events.clear()
        self.target = target = self.send("Target.createTarget", url="about:blank")["targetId"]
        if before:
            self.send("Target.closeTarget", targetId=before)
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        phone = width < 600
        size = {"width": width, "height": 860 if phone else 900}
        self.send("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=phone)
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        if scheme:
            self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.go(path.as_uri())

    def go(self, url: str) -> None:
        """Navigate the open tab to a file and wait until it is loaded."""
        self.send("Page.navigate", url=url)
        while self.run("location.protocol + document.readyState") != "file:complete":
            time.sleep(0.02)

    def run(self, code: str) -> Any:
        """Evaluate JavaScript in the page, wait for a promise, and return the value."""
        answer = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def place(self, selector: str) -> tuple[float, float, float]:
        """Left edge, top edge and width of an element, in CSS pixels."""
        x, y, width = self.run(
            f"(r => [r.x, r.y, r.width])(document.querySelector('{selector}').getBoundingClientRect())"
        )
        return x, y, width

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        box = self.run(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector('{selector}').getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        """Dispatch a touch event with a finger at each point."""
        fingers = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
        self.send("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)

    def picture(self, selector: str = ".map") -> str:
        """Pixels of a canvas as a data URL, for comparison."""
        return self.run(f"document.querySelector('{selector}').toDataURL()")

    def screenshot(self) -> bytes:
        """Visible part of the page as PNG."""
        return b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def faults(self) -> list[str]:
        """Exceptions, log entries and requests to other hosts since the page was opened."""
        found = [e["method"] for e in self.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return found + [url for url in sent if not url.startswith(("file:", "data:"))]

    def close(self) -> None:
        """End Chromium."""
        self.process.terminate()
        self.process.wait(10)
        self.reader.close()
        self.writer.close()
