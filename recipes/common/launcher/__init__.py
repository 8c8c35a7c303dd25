"""The launcher of the recipe: settings, checks, stages, Ray, and the meeting of several nodes."""
