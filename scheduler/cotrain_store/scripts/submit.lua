-- submit: accept one op of a run; seq 0 with a record also makes the run, and may bring its seq 1 along.
-- The commit point: an op is accepted when this script's effects are on disk. Twice is harmless.
-- Answers what became of it, and its place. A client counts its own ops; a rider (no seq) has its
-- place behind all that is accepted by now, and what the client sends later moves behind it.
-- Without an envelope it only says ROOM for what it would take.
local record_key, log, ops, bodies, digests = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local ready, gaps, queue, queue_tenants, refs = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local session_runs, tenant_runs, wake, riders, training_runs =
  KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local run, tenant, seq, digest = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local envelope, body, segment = ARGV[5], ARGV[6], ARGV[7]
local tokens, size, now_ms = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10]
local max_ops, max_tokens, max_bytes = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local max_ahead, max_runs, record = tonumber(ARGV[14]), tonumber(ARGV[15]), ARGV[16]
local rider_key, pool_tag = ARGV[17], ARGV[18]
local created_at, max_unread = ARGV[19], tonumber(ARGV[20])
local next_digest, next_envelope, next_body, next_segment, next_size =
  ARGV[21], ARGV[22], ARGV[23], ARGV[24], tonumber(ARGV[25] or 0)
local sampler, idle_ms, rest_ms = ARGV[26], tonumber(ARGV[27]), tonumber(ARGV[28])
local max_samplers, max_sampler_bytes = tonumber(ARGV[29]), tonumber(ARGV[30])
local max_record_bytes = tonumber(ARGV[31])
local FIRST = 32 -- then the weights that the op uses
local ops_added = next_digest == '' and 1 or 2

local state = redis.call('HGET', log, 'state')
local place
if seq then
  place = seq + redis.call('ZCOUNT', riders, '-inf', seq)
else
  place = rider_key ~= '' and tonumber(redis.call('HGET', digests, 'key:' .. rider_key))
    or tonumber(redis.call('HGET', log, 'last') or -1) + 1
end
local known = redis.call('HGET', digests, place)
if known then
  return { known == digest and 'DUP' or 'CONFLICT', place }
end
if state and state ~= 'live' then
  return { state == 'closed' and 'CLOSED' or 'FAILED' }
end
if not state and redis.call('EXISTS', record_key) == 1 then -- the run of a copied checkpoint
  return { record == '' and 'CLOSED' or 'CONFLICT' }
end
if not state and record == '' then
  return { 'GONE' }
end
if not state and redis.call('SCARD', tenant_runs) >= max_runs then
  return { 'RUNS' }
end
if not state and record_bytes(tenant) >= max_record_bytes then
  return { 'RECORDS' }
end
local next_seq = tonumber(redis.call('HGET', log, 'next') or 0)
local done = tonumber(redis.call('HGET', log, 'done') or -1)
if place < next_seq then
  return { 'DUP', place } -- planned so long ago that its digest is gone; its result answers, or has expired
end
if place > done + max_ahead then
  return { 'FAR' }
end
-- What everything accepted of this run waits for is taken into a full queue: else it would stay full.
local fills_gap = place == next_seq and place < tonumber(redis.call('HGET', log, 'last') or -1)
local queued = redis.call('HMGET', queue, 'ops', 'tokens', 'bytes')
if not fills_gap and (tonumber(queued[1] or 0) + ops_added > max_ops
  or tonumber(queued[2] or 0) + tokens > max_tokens
  or tonumber(queued[3] or 0) + size + next_size > max_bytes) then
  return { 'BUSY' }
end
if unread_bytes(tenant) >= max_unread then
  return { 'UNREAD' }
end
for i = FIRST, #ARGV do
  if (redis.call('HGET', 'cotrain:weights:' .. ARGV[i], 'digest') or '') == '' then
    return { 'WEIGHTS' }
  end
end
if sampler ~= '' and (count_samplers(tenant) >= max_samplers
  or not make_sampler_room(tenant, max_sampler_bytes, idle_ms, rest_ms)) then
  return { 'SAMPLERS' }
end
if envelope == '' then
  return { 'ROOM' }
end

if not state then
  redis.call('HSET', record_key, 'record', record)
  count_record(tenant, record)
  redis.call('HSET', log, 'state', 'live', 'tenant', tenant, 'next', 0, 'done', -1, 'snap', -1, 'last', -1)
  redis.call('SADD', session_runs, run)
  redis.call('SADD', tenant_runs, run)
  redis.call('ZADD', training_runs, created_at, run)
end
redis.call('HSET', record_key, 'last_request_at', string.format('%.3f', now_ms / 1000))
if not seq then
  redis.call('ZADD', riders, place - redis.call('ZCARD', riders), place)
  if rider_key ~= '' then
    redis.call('HSET', digests, 'key:' .. rider_key, place, 'rider:' .. place, rider_key)
  end
end
for i = FIRST, #ARGV do
  local user = 'l:' .. pool_tag .. run .. ':' .. place
  redis.call('SADD', 'cotrain:weights:' .. ARGV[i] .. ':users', user)
end
if sampler ~= '' then
  list_sampler(tenant, sampler, idle_ms)
end

local function keep(at, its_digest, its_envelope, its_body, its_segment)
  redis.call('HSET', ops, at, its_envelope)
  redis.call('HSET', digests, at, its_digest)
  if its_segment == '' then
    redis.call('HSET', bodies, at, its_body)
  else
    redis.call('HINCRBY', refs, its_segment, 1)
  end
  if at > tonumber(redis.call('HGET', log, 'last')) then
    redis.call('HSET', log, 'last', at)
  end
end

keep(place, digest, envelope, body, segment)
if ops_added == 2 then
  keep(place + 1, next_digest, next_envelope, next_body, next_segment)
end
redis.call('HINCRBY', queue, 'ops', ops_added)
redis.call('HINCRBY', queue, 'tokens', tokens)
redis.call('HINCRBY', queue, 'bytes', size + next_size)
redis.call('SADD', queue_tenants, tenant)
if place == next_seq then
  redis.call('ZREM', gaps, run)
  give_up_ops(log, queue, 0, 0)
  redis.call('ZADD', ready, 'NX', now_ms, run)
  redis.call('PUBLISH', wake, 'ready')
elseif redis.call('HEXISTS', ops, next_seq) == 0 then
  redis.call('ZADD', gaps, 'NX', redis.call('HGET', log, 'given_up_since') or clock_in(0), run)
end
return { 'NEW', place }
