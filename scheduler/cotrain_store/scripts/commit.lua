-- commit: publish a step's results, advance `done` and end the cycle, atomically.
-- Fenced by the worker's epoch. An op is committed only directly after its predecessor in the run. Idempotent.
-- Ops without a result return to the head of their run's queue (`args.back`).
-- needs: fence, counts, idle_tenant, unread, samplers, given_up, fail_waiting, changed, history, swept, webhook_event, rewind, spool_refs
-- The cycle's record follows `args`, then the results in the order of `args.ops`.
-- (`0 - n`, not `-n`: Lua writes minus zero as '-0', which Redis rejects as an integer.)
local record, RESULTS = ARGV[2], 2
local prefix, cycle, numerics = args.prefix, args.cycle, args.numerics
local open = prefix .. 'open:' .. args.worker

if redis.call('HEXISTS', open, cycle) == 0 then
  return 'DONE'
end

-- Queue an event when the mean rollout gap of a run's pass exceeds the limit of its tenant's webhook. The next event of the run
-- follows only after a pass below the limit.
local drift_limits = {}
local function record_drift(tenant, run, seq, found)
  if (found.sampled or 0) == 0 then
    return
  end
  drift_limits[tenant] = drift_limits[tenant] or
    tonumber(redis.call('HGET', 'cotrain:tenant:' .. tenant .. ':webhook', 'drift_above') or '') or math.huge
  local limit = drift_limits[tenant]
  local key, gap = 'cotrain:run:' .. run, found.gap / found.sampled
  if gap <= limit then
    redis.call('HDEL', key, 'drifts')
  elseif redis.call('HSETNX', key, 'drifts', seq) == 1 then
    queue_event(tenant, 'run.drift', { training_run_id = run, seq = seq, rollout_gap = gap, limit = limit })
  end
end

local done = {}
for i, op in ipairs(args.ops) do
  if is_result_swept(ARGV[RESULTS + i]) then
    return 'SWEPT'
  end
  local run = op.run
  done[run] = done[run] or tonumber(redis.call('HGET', prefix .. 'log:' .. run, 'done'))
  if op.seq > done[run] + 1 then
    return 'ORDER'
  end
  done[run] = math.max(done[run], op.seq)
end
for _, part in ipairs(args.back) do
  done[part.run] = done[part.run] or tonumber(redis.call('HGET', prefix .. 'log:' .. part.run, 'done'))
  if part.seq ~= done[part.run] + 1 then
    return 'ORDER'
  end
end

-- Histories of the step's runs, each read and written once.
local histories = {}
local function history_of(run)
  if not histories[run] then
    histories[run] = parse_history(redis.call('GET', 'cotrain:run:' .. run .. ':history'))
  end
  return histories[run]
end

-- Reserve the name of a save until its weights are stored. The result is published then. Returns false if the
-- name is in use. The request id identifies the weights. A sampler, unlike a name, refers to them at once.
local function reserve(ref, run, seq, save, result, ttl_ms)
  local checkpoint = 'cotrain:checkpoint:' .. save.name
  local pending = 'cotrain:checkpoint:' .. save.name .. ':pending'
  if save.collision and redis.call('EXISTS', checkpoint, pending) > 0 then
    return false
  end
  redis.call('ZADD', pending, seq, ref)
  redis.call('SADD', 'cotrain:tenant:' .. save.tenant .. ':owed', ref)
  -- Of two fields with one name, every reader uses the second.
  local user = string.sub(save.user, 1, -2) .. ',' .. metrics_json(history_of(run), run) .. '}'
  redis.call('HSET', 'cotrain:weights:' .. ref, 'checkpoint', user, 'result', result,
    'ttl', ttl_ms, 'last', save.last)
  return true
end

local function add_sampler(ref, run, save)
  local user = string.format('%s,"step":%.0f}', string.sub(save.user, 1, -2), history_of(run).steps)
  if redis.call('SET', 'cotrain:sampler:' .. save.name, user, 'NX') then
    end_after('cotrain:sampler:' .. save.name, save.idle_ms)
    list_sampler(save.tenant, save.name, save.idle_ms)
    redis.call('SADD', 'cotrain:session:' .. save.session .. ':samplers', save.name)
    redis.call('SADD', 'cotrain:weights:' .. ref .. ':users', 's:' .. save.name)
  end
end

local function record_unstored(ref, run, save)
  redis.call('HSET', 'cotrain:weights:' .. ref, 'record', save.weights, 'worker', save.worker,
    'digest', '', 'size', 0, 'history', pack_history(history_of(run)))
  redis.call('SADD', prefix .. 'weights', ref)
  redis.call('SADD', prefix .. 'unstored:' .. save.worker, ref)
  if save.folder then
    redis.call('SADD', prefix .. 'external', save.folder)
  end
end

-- Write the records of a save. Returns its result, or nil if it is published later.
local function write_save(ref, run, seq, save, result, ttl_ms)
  if save.kind == 's' then
    add_sampler(ref, run, save)
  elseif reserve(ref, run, seq, save, result, ttl_ms) then
    result = nil
  else
    return save.collision
  end
  record_unstored(ref, run, save)
  return result
end

local resolved, points = {}, {}
local served = {} -- sums of the committed ops, which leave the queue of each tenant
for i, op in ipairs(args.ops) do
  local run, seq, tenant = op.run, op.seq, op.tenant
  local log = prefix .. 'log:' .. run
  local row = redis.call('HMGET', log, 'done', 'numerics', 'begun')
  if seq == tonumber(row[1]) + 1 then
    local request = run .. ':' .. seq
    local result, ttl_ms = ARGV[RESULTS + i], op.ttl_ms
    if args.saves[request] then
      result = write_save(request, run, seq, args.saves[request], result, ttl_ms)
    end
    if result then
      if put_result(request, result, ttl_ms) then
        record_unread(tenant, request, op.result_bytes, ttl_ms)
      end
      resolved[#resolved + 1] = request
    end
    if result and string.sub(result, 1, 1) == args.failure_kind then
      redis.call('HINCRBY', log, 'failed', 1)
      add_failure(args.minute, tenant, request, result, args.minute_ttl_s)
    end
    redis.call('HSET', log, 'done', seq, 'numerics', (row[2] or numerics) == numerics and numerics or 'mixed')
    if row[3] then
      redis.call('HDEL', log, 'begun')
    end
    if op.found and op.found.to_seq then
      points[run] = (points[run] or 0) + rewind_run(history_of(run), run, log, seq, op.found)
    elseif op.found then
      points[run] = (points[run] or 0) + record_entry(history_of(run), run, seq, op.found, op.tokens, args.time_s)
      record_drift(tenant, run, seq, op.found)
      if op.found.norm then
        redis.call('HSET', log, 'step:' .. seq, history_of(run).steps)
      end
    elseif op.replaces_state then
      forget_passes(history_of(run)) -- the pending gradient was discarded
      points[run] = points[run] or 0
    end
    local left = served[tenant] or { ops = 0, tokens = 0, bytes = 0 }
    served[tenant] = { ops = left.ops + 1, tokens = left.tokens + op.tokens, bytes = left.bytes + op.size }
    -- An op without effect on the state keeps its seq in the log, but not its body.
    if op.released == 'inline' then
      redis.call('HDEL', prefix .. 'bodies:' .. run, seq)
    else
      release_segment(op.released)
    end
    if op.envelope then
      redis.call('HSET', prefix .. 'ops:' .. run, seq, op.envelope)
    end
  end
end
for _, op in ipairs(args.ops) do
  local more = points[op.run]
  if more then
    redis.call('SET', 'cotrain:run:' .. op.run .. ':history', pack_history(histories[op.run]))
    count_points(op.tenant, op.run, more, args.time_s, args.history_points)
    points[op.run] = nil
  end
end
for _, part in ipairs(args.back) do
  local run, tenant, log = part.run, part.tenant, prefix .. 'log:' .. part.run
  local row = redis.call('HMGET', log, 'state', 'next')
  redis.call('HSET', log, 'next', part.seq)
  record_change(prefix, run)
  if row[1] == 'live' then
    if part.begun > 0 then
      redis.call('HSET', log, 'begun', part.seq .. ':' .. part.begun .. ':' .. args.epoch)
    end
    redis.call('ZADD', prefix .. 'ready', 'NX', part.waits_since_ms, run)
    -- Ops after a gap wait for this op first. They are therefore not part of a gap yet, and count as queued.
    redis.call('ZREM', prefix .. 'gaps', run)
    set_given_up(log, prefix .. 'queue:' .. tenant, 0, 0)
  else -- the run ended during the step
    fail_waiting(prefix, run, tenant, part.seq, tonumber(row[2]) - 1, args.failures[row[1]],
      args.failure_ttl_ms, resolved)
  end
end
for tenant, left in pairs(served) do
  for field, amount in pairs(left) do
    redis.call('HINCRBY', prefix .. 'queue:' .. tenant, field, 0 - amount)
  end
  remove_if_idle(prefix, tenant)
end
redis.call('HDEL', open, cycle)
redis.call('HDEL', prefix .. 'starts', cycle)
for _, part in ipairs(redis.call('HKEYS', prefix .. 'deaths')) do
  local run, seq = string.match(part, '^([^.]*):(%d+)')
  if done[run] and tonumber(seq) <= done[run] then -- keep the counts of ops that return and run again
    redis.call('HDEL', prefix .. 'deaths', part)
  end
end
add_counters(prefix, args.counted)
add_minute(args.minute, args.minute_counts, args.minute_ttl_s)
for usage, fields in pairs(args.used) do
  for field, amount in pairs(fields) do
    add_usage(usage, field, amount, args.usage_ttl_s)
  end
end
redis.call('LPUSH', prefix .. 'cycles', record)
redis.call('LTRIM', prefix .. 'cycles', 0, args.cycles_kept - 1)
redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\n'))
redis.call('PUBLISH', 'cotrain:notify:scheduler', 'free ' .. string.match(prefix, '{.*$'))
return 'OK'
