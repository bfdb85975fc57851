"""A dstack server plugin that lets shims which keep state restart under running jobs."""
