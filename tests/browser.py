"""A headless Chromium for tests, over the DevTools protocol: no driver, no port, no network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
--disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage
--remote-debugging-pipe""".split()
# Chromium reads its commands from descriptor 3 and answers in 4.
START = """
import fcntl, os, sys
of_commands, of_answers = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(of_commands, 3); os.dup2(of_answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of a browser; close it, or use it as a context."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = TemporaryDirectory(
            prefix="chromium-", ignore_cleanup_errors=True
        )
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        words = [
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(commands), str(answers), *words],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._number, self._session, self._unread = 0, "", b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the protocol and returns its result."""
        self._number += 1
        message: dict[str, Any] = {
            "id": self._number,
            "method": method,
            "params": parameters,
        }
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self, seconds: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            part = os.read(self._answers, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser does not answer")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def open(
        self, path: Path, width: int = 1280, height: int = 900, dark: bool = False
    ) -> float:
        """Opens a file; returns the seconds from the start of loading to the page's load event."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        ]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(
            each.get("method") == "Page.loadEventFired" for each in self.events
        ):
            self.events.append(self._read())
        timing = "performance.getEntriesByType('navigation')[0].loadEventStart / 1000"
        return float(self.run(timing))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """A click of the mouse in the midst of an element."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
            )

    def point(self, selector: str, across: float = 0.5) -> None:
        """Moves the pointer over an element."""
        x, y = self.middle(selector, across)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, selector: str, across: float = 0.5) -> tuple[float, float]:
        """Where an element is, once it is scrolled into view."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"{element}.getBoundingClientRect().toJSON()")
        return box["x"] + across * box["width"], box["y"] + box["height"] / 2

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def key(self, name: str) -> None:
        """Presses a key, such as Tab or Enter."""
        code = {"Tab": 9, "Enter": 13}[name]
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            of_kind = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                **of_kind,
            )

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        """A PNG of what is seen, or of the whole page."""
        taken = self.call(
            "Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole)
        )
        path.write_bytes(base64.b64decode(taken["data"]))
        return path

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {**size, "height": min(size["height"], 6000), "scale": 1}}

    def errors(self) -> list[str]:
        """What scripts of the page threw, and what the console has as an error."""
        found = []
        for each in self.events:
            parameters = each.get("params", {})
            if each.get("method") == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif (
                each.get("method") == "Log.entryAdded"
                and parameters["entry"]["level"] == "error"
            ):
                found.append(parameters["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        sent = [
            each
            for each in self.events
            if each.get("method") == "Network.requestWillBeSent"
        ]
        return [each["params"]["request"]["url"] for each in sent]
