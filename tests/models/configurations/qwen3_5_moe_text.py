"""Tiny text models of Qwen3.5-MoE."""

from __future__ import annotations

from dataclasses import replace

from models.configurations import qwen3_5_moe

TINY = replace(qwen3_5_moe.TINY, saved_as="")
