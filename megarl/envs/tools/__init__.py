"""Tool use: chat models call functions and continue with their results."""

from megarl.envs.tools.environment import Tools, ToolSettings

__all__ = ["ToolSettings", "Tools"]
