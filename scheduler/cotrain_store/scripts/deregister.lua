-- deregister: remove a drained worker from its pool. Its runs then have no worker, and sample requests that waited
-- for it wait for any worker. Idempotent.
-- Fenced by the scheduler's epoch. A worker whose process ends (`leaves`) calls it itself, fenced by its own epoch.
-- Returns OUTDATED if anything is open, unstored or claimed on the worker.
-- needs: fence, pool_leave
local prefix, worker = args.prefix, args.worker

if redis.call('GET', prefix .. 'epoch:' .. worker) ~= args.seen_epoch
  or not args.leaves and redis.call('HEXISTS', prefix .. 'draining', worker) == 0
  or redis.call('EXISTS', prefix .. 'worker:' .. args.successor) == 0
  or redis.call('EXISTS', prefix .. 'open:' .. worker, prefix .. 'unstored:' .. worker,
    prefix .. 'claimed:' .. worker) > 0 then
  return 'OUTDATED'
end
leave_pool(prefix, worker, args.successor, args.any_worker)
return 'OK'
