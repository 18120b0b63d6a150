-- webhook_tried: record the outcome of an attempt: the event is done, or due again after `args.retry_in_ms`.
-- Fenced by the epoch of the webhook sender. A webhook that was removed in the meantime stays removed.
-- needs: fence, ages
local hook = 'cotrain:tenant:' .. args.tenant .. ':webhook'
local events, due = hook .. '_events', hook .. '_due'

local event = redis.call('HGET', events, args.event)
if not event or redis.call('EXISTS', hook) == 0 then
  return 'GONE'
end
if args.retry_in_ms then
  local came, attempts, body = string.match(event, '^(%d+)|(%d+)|(.*)$')
  redis.call('HSET', events, args.event, came .. '|' .. (attempts + 1) .. '|' .. body)
  redis.call('ZADD', due, clock_in(args.retry_in_ms), args.event)
else
  redis.call('HDEL', events, args.event)
  redis.call('ZREM', due, args.event)
end
redis.call('HINCRBY', hook, args.outcome, 1)
redis.call('HSET', hook, 'last_event', args.event, 'last_outcome', args.outcome, 'last_answer', args.answer,
  'last_at', redis.call('TIME')[1])
local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
if first[1] then
  redis.call('ZADD', 'cotrain:webhooks:due', first[2], args.tenant)
else
  redis.call('ZREM', 'cotrain:webhooks:due', args.tenant)
end
return 'OK'
