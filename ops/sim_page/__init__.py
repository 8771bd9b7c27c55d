"""The page that shows a comparison of policies."""
