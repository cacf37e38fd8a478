"""Search: searchers behind ask and tell, one driver that owns evaluation, log, resume and budget."""
