"""Tool use: chat models call functions, and go on with what these return."""

from megarl.envs.tools.environment import Tools, ToolSettings

__all__ = ["ToolSettings", "Tools"]
