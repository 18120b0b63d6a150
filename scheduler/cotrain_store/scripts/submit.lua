-- submit: accept one op of a run, or several at once (`together`). Seq 0 with a record also creates the run, and may include its seq 1 (`save`).
-- An op is accepted when this script's effects are on disk. Idempotent.
-- needs: unread, samplers, records, given_up, run_bytes, changed, swept
-- Returns the outcome and the op's seq in the log. A client numbers its own ops (`seq`). An unnumbered op gets the seq
-- after all accepted ops, and the log seqs of the client's later ops are higher by one.
-- Without an envelope the script only checks the op: it returns ROOM if the op would be accepted, and writes nothing.
local function submit(args, body, save_body)
  local prefix, run, tenant = 'cotrain:' .. args.pool_tag, args.run, args.tenant
  local log, ops, digests = prefix .. 'log:' .. run, prefix .. 'ops:' .. run, prefix .. 'digests:' .. run
  local queue, unnumbered = prefix .. 'queue:' .. tenant, prefix .. 'riders:' .. run
  local record_key, tenant_runs = 'cotrain:run:' .. run, 'cotrain:tenant:' .. tenant .. ':runs'
  local seq, op, save, max = args.seq, args.op, args.save, args.limits
  local ops_added = save and 2 or 1

  local state, last, next_seq, done, given_up_since, run_worker =
    unpack(redis.call('HMGET', log, 'state', 'last', 'next', 'done', 'given_up_since', 'worker'))
  last, next_seq, done = tonumber(last or -1), tonumber(next_seq or 0), tonumber(done or -1)
  local log_seq
  if seq then
    log_seq = seq + redis.call('ZCOUNT', unnumbered, '-inf', seq)
  else
    log_seq = args.idempotency_key and tonumber(redis.call('HGET', digests, 'key:' .. args.idempotency_key))
      or last + 1
  end
  local known = redis.call('HGET', digests, log_seq)
  if known then
    return { known == op.digest and 'DUP' or 'CONFLICT', log_seq }
  end
  if state and state ~= 'live' then
    return { state == 'closed' and 'CLOSED' or 'FAILED' }
  end
  if not state and redis.call('EXISTS', record_key) == 1 then -- the run of a copied checkpoint
    return { args.record and 'CONFLICT' or 'CLOSED' }
  end
  if not state and not args.record then
    return { 'GONE' }
  end
  if not state and redis.call('SCARD', tenant_runs) >= max.runs then
    return { 'RUNS', redis.call('SCARD', tenant_runs), table.concat(redis.call('SRANDMEMBER', tenant_runs, 3), ', ') }
  end
  if not state and record_bytes(tenant) >= max.record_bytes then
    return { 'RECORDS' }
  end
  local refused = not state and args.weighs and refuse_run(tenant, args.weighs)
  if refused then
    return refused
  end
  if log_seq < next_seq then
    return { 'DUP', log_seq } -- its digest was deleted long after it was planned; its result is available or expired
  end
  if log_seq > done + args.max_seq_gap then
    return { 'FAR' }
  end
  -- A missing op that all accepted ops of the run wait for is accepted even into a full queue. Otherwise the queue
  -- would stay full.
  local fills_gap = log_seq == next_seq and log_seq < last
  local queued = redis.call('HMGET', queue, 'ops', 'tokens', 'bytes')
  local bytes_added = op.size + (save and save.size or 0)
  if not fills_gap and (tonumber(queued[1] or 0) + ops_added > max.ops
    or tonumber(queued[2] or 0) + args.tokens > max.tokens
    or tonumber(queued[3] or 0) + bytes_added > max.bytes) then
    return { 'BUSY', tonumber(queued[1] or 0), tonumber(queued[2] or 0), tonumber(queued[3] or 0) }
  end
  if unread_bytes(tenant) >= args.max_unread_bytes then
    return { 'UNREAD' }
  end
  local only_on -- the worker that alone has the weights until they are stored
  for _, ref in ipairs(args.uses) do
    local digest, worker = unpack(redis.call('HMGET', 'cotrain:weights:' .. ref, 'digest', 'worker'))
    if not digest or digest == '' and not args.forks then
      return { 'WEIGHTS' }
    end
    only_on = digest == '' and worker or only_on
  end
  if args.sampler and (count_samplers(tenant) >= max.samplers
    or not make_sampler_room(tenant, max.sampler_bytes, args.sampler_idle_ms, args.sampler_rest_ms)) then
    return { 'SAMPLERS' }
  end
  if not op.envelope then
    return { 'ROOM' }
  end
  if op.segment and is_swept(op.segment) or save and save.segment and is_swept(save.segment) then
    return { 'SWEPT' }
  end

  if not state then
    redis.call('HSET', record_key, 'record', args.record)
    count_record(tenant, args.record)
    redis.call('HSET', log, 'state', 'live', 'tenant', tenant, 'next', 0, 'done', -1, 'snap', -1, 'last', -1)
    redis.call('HINCRBY', prefix .. 'counters', 'runs_made', 1)
    redis.call('SADD', 'cotrain:session:' .. args.session .. ':runs', run)
    redis.call('SADD', tenant_runs, run)
    redis.call('HSET', 'cotrain:tenant:' .. tenant .. ':history', 'quota', max.history_points)
    if args.weighs then
      hold_run(log, tenant, args.weighs.bytes, args.weighs.disk_bytes)
    end
    redis.call('ZADD', 'cotrain:tenant:' .. tenant .. ':training_runs', args.created_at, run)
    redis.call('ZADD', 'cotrain:training_runs', args.created_at, run)
    if only_on then
      redis.call('HSET', log, 'worker', only_on, 'source', args.uses[1])
      run_worker = only_on
    end
  end
  redis.call('HSET', record_key, 'last_request_at', string.format('%.3f', args.now_ms / 1000))
  if not seq then
    redis.call('ZADD', unnumbered, log_seq - redis.call('ZCARD', unnumbered), log_seq)
    if args.idempotency_key then
      redis.call('HSET', digests, 'key:' .. args.idempotency_key, log_seq,
        'rider:' .. log_seq, args.idempotency_key)
    end
  end
  for _, ref in ipairs(args.uses) do
    redis.call('SADD', 'cotrain:weights:' .. ref .. ':users', 'l:' .. args.pool_tag .. run .. ':' .. log_seq)
  end
  if args.sampler then
    list_sampler(tenant, args.sampler, args.sampler_idle_ms)
  end

  local function keep(at, kept, its_body)
    redis.call('HSET', ops, at, kept.envelope)
    redis.call('HSET', digests, at, kept.digest)
    if kept.segment then
      redis.call('HINCRBY', 'cotrain:spool:refs', kept.segment, 1)
    else
      redis.call('HSET', prefix .. 'bodies:' .. run, at, its_body)
    end
    if at > last then
      redis.call('HSET', log, 'last', at)
      last = at
    end
  end

  keep(log_seq, op, body)
  if save then
    keep(log_seq + 1, save, save_body)
  end
  redis.call('HINCRBY', queue, 'ops', ops_added)
  redis.call('HINCRBY', queue, 'tokens', args.tokens)
  redis.call('HINCRBY', queue, 'bytes', bytes_added)
  redis.call('SADD', prefix .. 'tenants', tenant)
  if log_seq > next_seq and redis.call('HEXISTS', ops, next_seq) == 0 then
    redis.call('ZADD', prefix .. 'gaps', 'NX', given_up_since or clock_in(0), run)
    return { 'NEW', log_seq }
  end
  record_change(prefix, run)
  if log_seq == next_seq then
    redis.call('ZREM', prefix .. 'gaps', run)
    if given_up_since then
      set_given_up(log, queue, 0, 0)
    end
    redis.call('ZADD', prefix .. 'ready', 'NX', args.now_ms, run)
    redis.call('PUBLISH', 'cotrain:notify:scheduler', 'ready ' .. args.pool_tag .. (run_worker or ''))
  end
  return { 'NEW', log_seq }
end

-- A change that no other command interrupts: a plan contains all ops that arrived together.
local given = cjson.decode(ARGV[1])
if not given.together then
  return submit(given, ARGV[2], ARGV[3])
end
local answers = {}
for i, args in ipairs(given.together) do
  answers[i] = submit(args, ARGV[i + 1], '')
end
return answers
