"""Start a model server, talk to it, stop it: for demo.py and benches/compare_llama_server.py.

Every wait is bounded, and every failure shows the server's last lines. Standard library only.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import time

from wheels import Problem, say

HOST = "127.0.0.1"


def free_port():
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


class Server:
    """A child process that serves HTTP on `port`. As a context manager it never outlives the block."""

    def __init__(self, name, command, port, log_path, environment=None):
        self.name = name
        self.port = port
        self.log_path = log_path
        os.makedirs(os.path.dirname(log_path), exist_ok=True)
        with open(log_path, "wb") as log:
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
            except OSError as error:
                raise Problem(f"cannot start {command[0]}: {error}") from error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def problem(self, what):
        """A Problem that ends with the server's last log lines."""
        try:
            with open(self.log_path, errors="replace") as log:
                lines = log.read().splitlines()[-20:]
        except OSError:
            lines = []
        tail = "\n".join(f"  | {line}" for line in lines) or "  | (nothing)"
        return Problem(f"{what}\nlast lines of {self.name} ({os.path.relpath(self.log_path)}):\n{tail}")

    def request(self, method, path, body=None, timeout=30):
        """A connection with the response to one request; the caller closes the connection."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            payload = None if body is None else json.dumps(body)
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, payload, headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise

    def text(self, path):
        try:
            connection, response = self.request("GET", path)
            try:
                status, body = response.status, response.read().decode()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise self.problem(f"GET {path} failed: {error!r}") from error
        if status != 200:
            raise self.problem(f"GET {path} answered {status}: {body[:500]}")
        return body

    def json(self, path):
        return self.parse(self.text(path), path)

    def parse(self, text, what):
        try:
            return json.loads(text)
        except ValueError as error:
            raise self.problem(f"{what}: not JSON ({error}): {text[:200]!r}") from error

    def wait_ready(self, limit_seconds):
        """Wait until /health answers 200; show the progress that it reports until then."""
        deadline = time.monotonic() + limit_seconds
        shown = -1.0
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.problem(f"{self.name} ended with exit code {self.process.returncode} while loading")
            try:
                connection, response = self.request("GET", "/health", timeout=5)
                try:
                    status, body = response.status, response.read()
                finally:
                    connection.close()
            except (OSError, http.client.HTTPException):
                # Not listening yet.
                time.sleep(0.05)
                continue
            if status == 200:
                return
            try:
                progress = json.loads(body).get("progress")
            except (ValueError, AttributeError):
                progress = None
            if isinstance(progress, (int, float)) and progress >= shown + 0.1:
                shown = progress
                say(f"  loading: {100 * progress:3.0f} %")
            time.sleep(0.05)
        raise self.problem(f"{self.name} was not ready after {limit_seconds} s")

    def events(self, path, body, limit_seconds):
        """The JSON objects of a streamed (SSE) answer as they arrive; ends at [DONE]."""
        deadline = time.monotonic() + limit_seconds
        try:
            connection, response = self.request("POST", path, body, timeout=limit_seconds)
            try:
                if response.status != 200:
                    raise self.problem(f"POST {path} answered {response.status}: {response.read(500)!r}")
                for line in response:
                    if time.monotonic() > deadline:
                        raise self.problem(f"the answer took longer than {limit_seconds} s")
                    line = line.decode().rstrip("\r\n")
                    if not line.startswith("data:"):
                        continue  # keep-alive comments and blank lines
                    data = line[len("data:") :].strip()
                    if data == "[DONE]":
                        return
                    event = self.parse(data, "an event of the stream")
                    if event.get("error"):
                        raise self.problem(f"the server reported an error: {event['error']}")
                    yield event
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise self.problem(f"POST {path} failed: {error!r}") from error
        raise self.problem("the stream ended without [DONE]")

    def stop(self, limit_seconds):
        """SIGTERM; the exit code must be 0."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            raise self.problem(f"{self.name} was still running {limit_seconds} s after SIGTERM") from None
        if status != 0:
            raise self.problem(f"{self.name} ended with exit code {status} after SIGTERM, not 0")
