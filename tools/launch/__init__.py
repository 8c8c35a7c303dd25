"""The launcher of the recipes: settings, checks, plan, Ray on every node, stages, logs."""
