"""Tiny models of Kimi-K2, which are those of DeepSeek-V3."""

from __future__ import annotations

from models.configurations import deepseek_v3

TINY = deepseek_v3.TINY
