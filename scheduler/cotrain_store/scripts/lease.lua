-- lease: acquire or renew the lease of a role. A new holder gets a new epoch, which fences the old one.
local args = cjson.decode(ARGV[1])
local lease, epoch = args.lease, args.fence

local holder = redis.call('GET', lease)
if holder == args.name and redis.call('GET', epoch) == args.epoch then
  redis.call('PEXPIRE', lease, args.ttl_ms)
  return args.epoch
end
-- A TTL above the maximum means that the host's time was set back. The holder may have crashed long ago.
local is_over = holder and redis.call('PTTL', lease) > args.ttl_ms
if holder and holder ~= args.name and not is_over then
  return ''
end
redis.call('DEL', lease) -- after a deletion, a full Redis rejects no write of the script
redis.call('SET', lease, args.name, 'PX', args.ttl_ms)
return tostring(redis.call('INCR', epoch))
