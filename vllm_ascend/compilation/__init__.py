"""ACL graphs."""
