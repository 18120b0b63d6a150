-- deregister: remove a drained worker from its pool. Its runs then have no worker, and sample requests that waited
-- for it wait for any worker. Idempotent.
-- Fenced by the scheduler's epoch. A worker whose process ends (`leaves`) calls it itself, fenced by its own epoch.
-- Returns OUTDATED if anything is open, unstored or claimed on the worker.
-- needs: fence
local prefix, worker = args.prefix, args.worker

if redis.call('GET', prefix .. 'epoch:' .. worker) ~= args.seen_epoch
  or not args.leaves and redis.call('HEXISTS', prefix .. 'draining', worker) == 0
  or redis.call('EXISTS', prefix .. 'worker:' .. args.successor) == 0
  or redis.call('EXISTS', prefix .. 'open:' .. worker, prefix .. 'unstored:' .. worker,
    prefix .. 'claimed:' .. worker) > 0 then
  return 'OUTDATED'
end
redis.call('SREM', prefix .. 'workers', worker)
for _, tenant in ipairs(redis.call('SMEMBERS', prefix .. 'tenants')) do
  local waiting = prefix .. 'waiting:' .. worker .. ':' .. tenant
  local request = redis.call('RPOP', waiting)
  while request do
    redis.call('HSET', 'cotrain:sample:' .. request, 'lane', args.any_worker)
    redis.call('LPUSH', prefix .. 'waiting:' .. args.any_worker .. ':' .. tenant, request)
    request = redis.call('RPOP', waiting)
  end
end
local drops = prefix .. 'drops:' .. args.successor
redis.call('SUNIONSTORE', drops, drops, prefix .. 'drops:' .. worker)
redis.call('DEL', prefix .. 'drops:' .. worker)
return 'OK'
