"""Starts ranks on one machine, or joins those of several machines; watches them, and ends all of
them if one fails."""
