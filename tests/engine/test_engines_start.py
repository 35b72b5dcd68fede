"""How a server's start fails, with a stand-in for the engine's Python that behaves as the test says."""
import asyncio
import stat
import sys

import pytest

from mrl.engine.api import EngineStartError
from mrl.engine.engines import SERVERS
from tests.rollout.experiments import experiment

STAND_IN = """#!{python}
import sys
if sys.argv[1] == "-c":
    print("0.0.0"); sys.exit()
print("starting", flush=True)
import http.server, json, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply("")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        answers = [{{"error": None, "run_id": "another", "engine": 0, "incarnation": 1}}]
        self.reply(json.dumps({{"results": answers, "success": True, "message": json.dumps(answers)}}))
    def reply(self, text):
        self.send_response(200); self.end_headers(); self.wfile.write(text.encode())
    def log_message(self, *_): pass
class Server(http.server.HTTPServer):
    allow_reuse_port = True
def serve():
    Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
{behaviour}
"""


@pytest.fixture(params=sorted(SERVERS))
def engine(request) -> str:
    return request.param


def start(tmp_path, engine: str, behaviour: str, **rollout) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, behaviour=behaviour))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    config = experiment(rollout={"engine": engine, "python": str(python), **rollout})
    log = tmp_path / "logs" / "engine_0.log"
    log.parent.mkdir()

    async def main():
        server = SERVERS[engine](config, 0, "run", 1, log, (), load_weights=False)
        try:
            await server.start()
        finally:
            await server.stop()
            assert server.process is None or server.process.poll() is not None

    asyncio.run(main())


def test_a_server_that_ends_while_starting_shows_the_end_of_its_log(tmp_path, engine):
    with pytest.raises(EngineStartError, match=r"(?s)exit code 3 while starting.*engine_0.log:\nstarting\nout of luck"):
        start(tmp_path, engine, "print('out of luck'); sys.exit(3)")


def test_a_server_that_never_answers_names_the_key(tmp_path, engine):
    with pytest.raises(EngineStartError, match=r"(?s)within rollout.start_timeout_s=6;.*starting"):
        start(tmp_path, engine, "time.sleep(600)", start_timeout_s=6)


def test_another_runs_server_is_not_taken_for_ours(tmp_path, engine):
    with pytest.raises(EngineStartError, match=r"another server answers.*'another'.*rollout.port"):
        start(tmp_path, engine, "serve()")


def test_a_python_that_fails_names_the_key(tmp_path, engine):
    with pytest.raises(EngineStartError, match=r"rollout.python='/.*/nothing': no such file or command"):
        start(tmp_path, engine, "", python=str(tmp_path / "nothing"))
