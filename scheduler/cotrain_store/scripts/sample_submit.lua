-- sample_submit: accept one sample request. Idempotent. Without a `ref` (location of its body) nothing is accepted,
-- and ROOM is returned if it would be.
-- needs: unread, samplers, swept
-- It is added to the queue of the worker with its unstored weights, else to the queue of all workers.
local args, body = cjson.decode(ARGV[1]), ARGV[2]
local request, tenant, prefix, size, max = args.request, args.tenant, args.prefix, args.size, args.limits
local sample, sampler = 'cotrain:sample:' .. request, 'cotrain:sampler:' .. args.sampler
local load = prefix .. 'samples:' .. tenant

local known = redis.call('HGET', sample, 'digest')
if known then
  return known == args.digest and 'DUP' or 'CONFLICT'
end
if redis.call('EXISTS', sampler) == 0 then
  return 'GONE'
end
if redis.call('HEXISTS', 'cotrain:session:' .. args.session, 'finished_at') == 1 then
  return 'FINISHED'
end
local queue = args.any_worker
if args.weights ~= '' then
  local row = redis.call('HMGET', 'cotrain:weights:' .. args.weights, 'worker', 'digest')
  if not row[1] then
    return 'GONE'
  end
  queue = row[2] == '' and row[1] or args.any_worker
end
local used = redis.call('HMGET', load, 'waiting', 'running', 'bytes', 'tokens')
local requests = tonumber(used[1] or 0) + tonumber(used[2] or 0)
if requests >= max.samples or tonumber(used[3] or 0) + size > max.bytes then
  return 'BUSY'
end
if requests > 0 and tonumber(used[4] or 0) + args.tokens > max.sample_tokens then
  return 'TOKENS'
end
if unread_bytes(tenant) >= args.max_unread_bytes then
  return 'UNREAD'
end
if not args.ref then
  return 'ROOM'
end
if args.segment and is_swept(args.segment) then
  return 'SWEPT'
end

redis.call('HSET', sample, 'state', 'waiting', 'tenant', tenant, 'sampler', args.sampler,
  'clone', args.clone, 'digest', args.digest, 'prefix', prefix, 'lane', queue, 'weights', args.weights,
  'ref', args.ref, 'size', size, 'tokens', args.tokens, 'at', args.accepted_at)
if args.trace then
  redis.call('HSET', sample, 'trace', args.trace)
end
if args.segment then
  redis.call('HINCRBY', 'cotrain:spool:refs', args.segment, 1)
else
  redis.call('HSET', sample, 'body', body)
end
redis.call('RPUSH', prefix .. 'waiting:' .. queue .. ':' .. tenant, request)
if redis.call('HINCRBY', load, 'waiting', 1) == 1 then
  redis.call('RPUSH', prefix .. 'sample_ring', tenant)
end
redis.call('HINCRBY', load, 'bytes', size)
redis.call('HINCRBY', load, 'tokens', args.tokens)
redis.call('SADD', prefix .. 'tenants', tenant)
end_after(sampler, args.idle_ms)
list_sampler(tenant, args.sampler, args.idle_ms)
if queue == args.any_worker then
  for _, worker in ipairs(redis.call('SMEMBERS', prefix .. 'workers')) do
    redis.call('PUBLISH', prefix .. 'notify:' .. worker, 'sample')
  end
else
  redis.call('PUBLISH', prefix .. 'notify:' .. queue, 'sample')
end
return 'NEW'
