-- run_close: end a run, by its tenant (closed) or because it cannot continue (failed). Unplanned ops fail at once.
-- Planned ops still commit, or fail when they return to the queue. Idempotent.
-- needs: ages, given_up, idle_tenant, fail_waiting, run_bytes, changed, webhook_event
-- Returns the resolved requests, or nil for a run without a log.
local function close_run(prefix, run, tenant, state, failure, ttl_ms)
  local log, ops = prefix .. 'log:' .. run, prefix .. 'ops:' .. run
  local row = redis.call('HMGET', log, 'state', 'next', 'last', 'worker')
  if not row[1] then
    return nil
  end
  local resolved = {}
  if row[1] == 'live' or row[1] == 'failed' and state == 'closed' then
    local queue = prefix .. 'queue:' .. tenant
    redis.call('HSET', log, 'state', state)
    if row[1] == 'live' then -- a failed run that is closed still counts as failed
      redis.call('HINCRBY', prefix .. 'counters', 'runs_' .. state, 1)
    end
    redis.call('HDEL', log, 'begun')
    redis.call('HDEL', 'cotrain:runs:paused', run)
    set_given_up(log, queue, 0, 0)
    redis.call('HSET', 'cotrain:run:' .. run, 'state', state)
    if row[1] == 'live' then
      queue_event(tenant, state == 'failed' and 'run.failed' or 'run.ended', { training_run_id = run })
    end
    redis.call('SREM', 'cotrain:tenant:' .. tenant .. ':runs', run)
    redis.call('ZREM', prefix .. 'ready', run)
    record_change(prefix, run)
    redis.call('ZREM', prefix .. 'gaps', run)
    fail_waiting(prefix, run, tenant, tonumber(row[2]), tonumber(row[3]), failure, ttl_ms, resolved)
    remove_if_idle(prefix, tenant)
    local worker = row[4]
    if worker and redis.call('SISMEMBER', prefix .. 'workers', worker) == 0 then
      worker = redis.call('SMEMBERS', prefix .. 'workers')[1] -- its own was removed
    end
    if worker and state == 'closed' then
      redis.call('SADD', prefix .. 'drops:' .. worker, run)
      redis.call('PUBLISH', prefix .. 'notify:' .. worker, run)
    elseif state == 'closed' then -- never planned, so no worker calls `forget`; stored results detect repeats
      end_after(prefix .. 'digests:' .. run, ttl_ms)
      end_after(prefix .. 'riders:' .. run, ttl_ms)
      release_run(log)
    end
  end
  return resolved
end
