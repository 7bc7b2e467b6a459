"""A server of the real package openenv: count up to a number. `python openenv_server.py PORT SESSIONS`."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Add(Action):
    number: int


class Sum(Observation):
    text: str = ""
    total: int = 0


class Count(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, goal=None, **kwargs):
        self.goal, self.total = goal or (seed or 0) % 10, 0
        return Sum(text=f"up to {self.goal}", done=False, reward=None)

    def step(self, action, **kwargs):
        if action.number == 13:
            raise RuntimeError("bad luck")
        self.total += action.number
        done = self.total >= self.goal
        return Sum(text=f"{self.total}", total=self.total, done=done, reward=float(self.total == self.goal))

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Count, Add, Sum, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
