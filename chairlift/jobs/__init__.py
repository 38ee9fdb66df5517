"""Batch jobs: each line of a file is a request, which a `Client` answers, and has exactly one result in the end.

How it is used; `client` may be the server's own application in this process:

    store = Store(data_dir / "jobs.sqlite")                  # blocks; one process at a time
    store.add_job(Job(id="batch_1", state="in_progress", entered={"in_progress": now}, about={...}))
    ledger = await asyncio.to_thread(Ledger, store, "batch_1", output_path, errors_path)
    open_reader = lambda: JsonLines(input_path, parse_batch_line)
    options = JobOptions(concurrency=..., wait_for_space=True, expires_at=...)
    executor = JobExecutor(client, ledger, open_reader, "batch_1", options)
    outcome = await executor.run()                           # goes on from where the store says the job is
    ledger.close()
    store.enter("batch_1", "completed", now)

`executor.cancel(grace)` makes `run` give all other lines an error and return CANCELLED, `executor.stop(grace)` makes it
leave them for the next run; both may be called before `run`. `executor.counts` and `executor.problem` (a full disk) are
of the moment, `store.checkpoint(id).counts` of the last commit. An errors file exists only if a line failed.
"""
