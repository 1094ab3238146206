"""Hopper: TMA and warpgroup matrix instructions."""
