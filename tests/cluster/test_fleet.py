"""How Ray is started."""
import os
import subprocess
import sys

SCRIPT = """
import os
import ray
from mrl.cluster.fleet import connect_ray
connect_ray("local", "priority")
print("nice", os.nice(0), ray.get(ray.remote(lambda: os.nice(0)).remote()))
"""


def test_actors_and_the_engines_they_start_have_the_launchers_priority():
    env = {name: value for name, value in os.environ.items() if name != "RAY_worker_niceness"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True,
                          env=env)
    mine, actors = done.stdout.partition("nice ")[2].split()
    assert mine == actors
